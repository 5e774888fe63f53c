"""Long programs that judge the whole: no tests of the suite, run by hand or at times."""
