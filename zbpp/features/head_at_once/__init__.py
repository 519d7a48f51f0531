"""The W of a language model's head at the end of its B: head_at_once."""
