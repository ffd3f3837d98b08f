"""Submissions, run and graded by what they ran.

- `tasks`: what is graded, for how many points, and the grade that comes out
- `recording`: one call of homework 4's function: what ran, on two emulated devices
- `homework4`: whether it was right
- `schedules`: a schedule against its pars
- `report`: grades as text, JSON, a table, and in the formats of Gradescope and Classroom 50
- `runner`: submissions in processes of their own, with limits
- `server`: the process that runs them
- `guard`: what they may not do there
"""
