"""Experts of a layer that are spread over processes.

experts            the feature
overlap_exchange   a feature: W's run while rows are exchanged
"""
