"""Why a run ends before its last step: a signal, a time limit, or a metric that improves no more."""
