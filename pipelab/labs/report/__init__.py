"""The report on a hybrid-parallel simulator, figure by figure: is it right, and how does the right value follow?

- `claim`: how the setting can be read, and what the verdict on a claim is
- `claims`: the report's claims, each with the functions that compute the right values
"""
