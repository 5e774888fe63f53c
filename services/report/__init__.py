"""`heterorl report`: one HTML page about a run, from files or coordinator.

Open `past_run` first: it reads the run. `report_page` fills the page, `figures` draws its pictures.
"""
