"""What each switch of memory and of the optimizer's step costs and saves, measured."""
