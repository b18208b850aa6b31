"""Reading what was written for the original EDL."""
