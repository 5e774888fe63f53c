"""`heterorl report`: one page about a past run, made of the files that it left behind."""
