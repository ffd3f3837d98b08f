"""`pipelab play`: a page that follows a file, and that nobody else can open."""

from __future__ import annotations

import html
import http.client
import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from browsing import complaints_of, wait_until
from commands import RIGHT
from processes import environment, free_port

import pipelab

HOSTILE = "</pre><script>document.title='owned'</script><img src=x onerror=alert(1)>{{fault}}"


class Playing:
    """A server that plays, and what it answers."""

    def __init__(self, *arguments):
        command = [sys.executable, "-m", "pipelab", "play", "--no-browser", *arguments]
        if "--port" not in arguments:
            command += ["--port", str(free_port())]
        env = environment(PYTHONDONTWRITEBYTECODE="")  # Python may keep what it compiles, as on a student's machine
        self.process = subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)
        self.url = re.search(r"http://\S+", self.process.stdout.readline())[0]
        self.address = urlsplit(self.url)

    def get(self, path="", **headers):
        """Return the status and the text of an answer; `path` is whole or begins behind the token."""
        connection = http.client.HTTPConnection("127.0.0.1", self.address.port, timeout=60)
        connection.request("GET", path if path[:1] == "/" else self.address.path + path, headers=headers)
        answer = connection.getresponse()
        text = answer.read().decode()
        connection.close()
        return answer.status, text

    def picture(self, words, seconds=60):
        """Wait until the picture, or the fault in its place, holds these words; return it."""
        deadline = time.monotonic() + seconds
        while words not in (text := html.unescape(self.get("draw")[1])):
            assert time.monotonic() < deadline, text[-500:]
            time.sleep(0.02)
        return text

    def end(self, by=signal.SIGINT):
        """End it as Ctrl-C does; return its exit code and how long that took."""
        self.process.send_signal(by)
        begun = time.monotonic()
        return self.process.wait(60), time.monotonic() - begun


@pytest.fixture
def play(folder):
    """Return a function that starts a server in a folder of its own."""
    started = []

    def starter(*arguments):
        started.append(Playing(*arguments))
        return started[-1]

    yield starter
    for each in started:
        each.process.kill()
        each.process.wait()
        each.process.stdout.close()


def write(text, name="mine.py"):
    Path(name).write_text(text)


def without(text):
    """Return a file whose schedule first does something else."""
    return RIGHT.replace(
        "        for m in range(self.microbatches):\n            yield F(m)", f"        {text}\n        yield F(0)", 1
    )


def gone(pid):
    """Return whether a process has ended, even if nobody has asked how."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def test_only_who_has_the_token_and_asks_for_this_machine_is_answered(play):
    server = play("1f1b")
    port = server.address.port
    assert server.get()[0] == server.get("draw")[0] == server.get(Host=f"localhost:{port}")[0] == 200
    assert server.get(Origin=f"http://127.0.0.1:{port}")[0] == 200
    for path in ("/", "/nonsense/", f"{server.address.path[:-2]}/", "/%ff/draw", "//", f"/x{server.address.path}"):
        assert server.get(path)[0] == 403
    for headers in ({"Host": f"evil.example:{port}"}, {"Host": ""}, {"Host": "127.0.0.1.evil.example"}):
        assert server.get(**headers)[0] == 403
    for origin in ("http://evil.example", "null", f"http://localhost:{port}", f"https://127.0.0.1:{port}"):
        assert server.get(Origin=origin)[0] == 403
    assert server.get("versions", Host="evil.example")[0] == 403
    assert server.get("other")[0] == 404
    with pytest.raises(ConnectionRefusedError):  # it listens on this machine's own address alone
        socket.create_connection(("127.0.0.2", port), timeout=10)
    second = play("1f1b", "--port", str(port))
    assert second.address.port > port
    assert second.get(server.address.path)[0] == 403


def test_the_options_are_those_of_the_other_commands(play):
    server = play("zb-h1", "-r", "2", "-m", "3", "--cost", "weight_grad=0.5", "--latency", "0.5")
    costs = pipelab.Cost(weight_grad=0.5, latency=0.5)
    trace = pipelab.simulate(pipelab.ZBH1(2, 3), costs)
    text = server.picture("W = 0.5")
    assert f"{trace.makespan:g} units" in text
    assert "2 ranks, 3 micro-batches" in text


def test_each_drawing_runs_the_file_and_what_it_imports_anew(play):
    write(RIGHT.replace("class MySchedule", "import helper\n\n\nclass MySchedule"))
    write("", "helper.py")
    server = play("mine.py:MySchedule")
    server.picture("33 units")
    write("raise ValueError('of the helper')", "helper.py")
    server.picture("of the helper")
    for shift in (1, 2) * 2:  # Python's compiled files know a source by its second and its length
        write("", "helper.py")
        write(RIGHT.replace("yield F(m)", f"yield F(m + {shift})"))
        server.picture(f"F{7 + shift} B0")


def test_a_file_that_does_not_end_is_shown_with_its_line_as_it_is_now(play):
    write(without("while True: rank += 1"))
    server = play("mine.py:MySchedule", "--seconds", "2")
    for step in (1, 20):
        write(without(f"while True: rank += {step}"))
        server.picture(f"while True: rank += {step}\n")


def test_what_a_file_does_to_its_process_does_not_reach_the_server(play):
    write(RIGHT)
    server = play("mine.py:MySchedule", "--seconds", "20")
    for line, words in (
        ("import os; os._exit(3)", "os._exit"),
        ("print('{\"page\": 1}'); input()", "EOFError"),
        ("import os; os.kill(os.getpid(), 9)", "os._exit"),
        ("raise SystemExit(5)", "SystemExit"),
        (f"raise ValueError({HOSTILE!r})", HOSTILE),
    ):
        write(without(line))
        server.picture(words)
    text = server.get("draw")[1]
    assert "&lt;/pre&gt;&lt;script&gt;" in text
    assert text.count("<script") == 0
    write("class Nothing(")
    server.picture("mine.py, line 1")
    Path("mine.py").unlink()
    server.picture("there is no file")
    write(RIGHT)
    server.picture("33 units")


def test_a_name_is_text_whatever_it_holds(play):
    name = "<img src=x onerror=alert(1)>{{name}}.py"
    write(without("1 / 0"), name)
    server = play(f"{name}:MySchedule")
    text = server.get()[1]
    assert "<img" not in text
    assert "&lt;img src=x onerror=alert(1)&gt;{{name}}.py:MySchedule" in text
    assert "ZeroDivisionError" in server.picture(f"{name}, line")
    assert "<img" not in server.get("draw")[1]


@pytest.mark.parametrize("by", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_a_loop_and_an_open_page_at_once_and_leaves_nothing(play, by):
    write(without("import os; open(f'{os.getpid()}.pid', 'w')\n        while True: pass"))
    server = play("mine.py:MySchedule", "--seconds", "60")
    with socket.create_connection(("127.0.0.1", server.address.port)) as page:
        page.sendall(f"GET {server.address.path}versions HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        deadline = time.monotonic() + 60
        while not (found := list(Path().glob("*.pid"))):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert not gone(found[0].stem)
        code, seconds = server.end(by)
    assert (code, seconds < 50) == (0, True)
    assert gone(found[0].stem)


def test_an_unknown_file_is_told_before_it_starts(pipelab_command, folder):
    write(RIGHT)
    code, _, error = pipelab_command("play", "mime.py:MySchedule", "--no-browser")
    assert (code, "mine.py" in error) == (1, True)


@pytest.fixture
def opened(browser, play):
    """Return a function that opens a server's page and fails the test on anything the browser complains about."""
    tab, complaints = browser.new_page(viewport={"width": 1300, "height": 800}), []

    def opener(server, path=""):
        complaints.append(complaints_of(tab, server.url))
        tab.goto(server.url + path, wait_until="domcontentloaded")
        return tab

    yield opener
    tab.close()
    assert not any(complaints)


def shows(tab, words):
    """Wait until the picture, or the fault in its place, holds these words."""
    wait_until(
        tab,
        f"frame && !main.querySelector('.next') && frame.contentDocument.body.innerText.includes({json.dumps(words)})",
    )


def test_a_saved_file_is_drawn_again_with_the_same_selection_and_zoom(opened, play):
    write(RIGHT)
    tab = opened(play("mine.py:MySchedule"))
    shows(tab, "33 units")
    picture = tab.frames[-1]
    picture.locator("[data-action='1B3']").click(force=True)
    tab.keyboard.press("+")
    wait_until(
        tab, "frame.contentWindow.location.hash.includes('1B3') && frame.contentWindow.location.hash.includes('z=')"
    )

    def shown():  # after 200 ms the page writes its zoom anew, with other last digits
        address = tab.evaluate("frame.contentWindow.location.hash")
        return re.sub(r"\d+\.\d+", lambda number: f"{float(number[0]):.3f}", address)

    before = shown()
    write(
        RIGHT.replace(
            "for m in range(self.microbatches):\n            yield B",
            "for m in reversed(range(self.microbatches)):\n            yield B",
        )
    )
    wait_until(tab, "version === '2' && !main.querySelector('.next')")
    assert shown() == before
    assert tab.frames[-1].locator("#panel h3").inner_text() == "1B3"
    assert tab.locator("iframe").count() == 1
    tab.reload()
    shows(tab, "33 units")
    assert "1B3" in tab.url


def test_a_fault_and_a_loop_stand_in_the_pictures_place_until_the_file_is_right(opened, play):
    write(RIGHT)
    server = play("mine.py:MySchedule", "--seconds", "4")
    tab = opened(server)
    shows(tab, "33 units")
    write(RIGHT.replace("yield F(m)", "yield F(m + 1)"))
    shows(tab, "out-of-range")
    last = "[...document.querySelectorAll('iframe')].map(each => [each.className, each.inert])"
    assert tab.evaluate(last) == [["", False], ["last", True]]  # the last picture without a fault is below
    write(without("while True: pass"))
    shows(tab, "while True: pass")
    assert tab.evaluate(last) == [["", False], ["last", True]]
    write(without(f"raise ValueError({HOSTILE!r})"))
    shows(tab, HOSTILE)
    assert tab.evaluate("frame.contentDocument.images.length + frame.contentDocument.scripts.length") == 0
    write(RIGHT)
    shows(tab, "33 units")
    assert tab.evaluate(last) == [["", False]]


def test_a_save_ends_a_loop_before_its_time(play):
    write(without("open('begun', 'w')\n        while True: pass"))
    server = play("mine.py:MySchedule", "--seconds", "200")
    deadline = time.monotonic() + 60
    while not Path("begun").exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    write(RIGHT)
    server.picture("33 units")


def test_the_page_says_that_the_server_has_ended(browser, play):
    server = play("1f1b")
    tab = browser.new_page()
    tab.goto(server.url)
    shows(tab, "1F1B")
    server.end()
    wait_until(tab, "state.value.includes('start it again')")
    assert "4 ranks" in tab.frames[-1].locator("h1").inner_text()
    tab.close()
