"""`heterorl report`: one HTML page about a run.
The data are read from files or asked of the coordinator.

Open `past_run` first: it reads the run. `report_page` fills the page, `figures` draws its pictures.
"""
