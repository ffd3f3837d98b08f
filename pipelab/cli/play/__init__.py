"""`pipelab play`: a local page that draws a schedule again when its file is saved or a slider is moved.

- `server`: the command, and the server of the page

`play.html` is the page around the picture, with the sliders of `sliders.html`; `gallery.html` shows all schedules, and
`fault.html` takes the picture's place. `python -m pipelab.cli.play` is the process in which schedules are made and
drawn.
"""
