"""`heterorl report`: one HTML page about a run, read from its files or asked of its coordinator.

Open `past_run` first: it reads the run. `report_page` fills the page, `figures` draws its pictures.
"""
