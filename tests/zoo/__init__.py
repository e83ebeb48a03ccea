"""Every causal language model of the installed transformers, tiny and random: found by code, checked, listed."""
