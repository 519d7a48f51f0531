"""Models that are built one stage at a time: see `zbpp.stage_api.PipelineModel`."""
