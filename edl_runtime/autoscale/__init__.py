"""How many instances each job may have: the policy, traffic windows, and a simulator that drives them on traces."""
