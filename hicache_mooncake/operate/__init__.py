"""The operator's side: what the pool is, what it holds and what is wrong, for people and for scripts."""
