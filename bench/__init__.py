"""The measurements behind the figures this project states.

They need a source checkout; ``vecenv`` never imports them.

``python -m bench --help`` lists the parts; ``bench/README.md`` says how to repeat the tables.
"""
