"""The gateway: one URL for each pool of language models, to which trainers of other projects send their requests."""
