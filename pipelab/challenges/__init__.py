"""Levels for learners: a goal, a par that is proven, hints, and a judge that says no in `check`'s own words.

- `levels`: the levels, what may run next in one, and what an attempt is worth

`levels.toml` holds the levels themselves.
"""
