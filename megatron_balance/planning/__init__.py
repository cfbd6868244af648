"""Plans for the steps of a run: layers around a planner, planning ahead, pipeline ticks."""
