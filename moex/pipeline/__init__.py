"""Pipeline parallelism: schedules as tables, and a tick that runs one forward and one backward unit of them."""
