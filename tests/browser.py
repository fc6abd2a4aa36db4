"""Headless Chromium, driven through its own debugging protocol over a pipe: no package needed."""

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
    "--disable-background-networking --disable-extensions --hide-scrollbars "
    "--proxy-server=127.0.0.1:9 --remote-debugging-pipe"  # nobody answers there
)
# Becomes the browser, with the two pipes as its file descriptors 3 and 4.
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(x), fcntl.F_DUPFD, 10) for x in sys.argv[1:3]]
for number, end in enumerate(ends, 3):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""


def chromium() -> str | None:
    """The browser's command, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Browser:
    """One page of a browser without windows, network or profile.

    Messages are JSON, each ended by a NUL byte; Chromium reads them from its file descriptor 3
    and answers on 4. (https://chromedevtools.github.io/devtools-protocol)
    """

    def __init__(self, profile: Path, seconds: float = 60):
        to_read, self.to = os.pipe()
        self.back, to_write = os.pipe()
        command = [chromium(), *OPTIONS.split(), f"--user-data-dir={profile}"]
        self.process = subprocess.Popen(
            [sys.executable, "-I", "-c", LAUNCH, str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_read)
        os.close(to_write)
        self.seconds, self.number, self.rest, self.session = seconds, 0, b"", None
        # What scripts threw, what the console calls an error, what was asked of the network.
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        """What the browser answers; a RuntimeError where it answers with an error."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while (answer := self._receive()).get("id") != self.number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def open(self, url: str, width: int = 1280, height: int = 900, **media: str) -> None:
        """The page at `url`, loaded; `media` as in prefers_color_scheme="dark"."""
        features = [{"name": k.replace("_", "-"), "value": v} for k, v in media.items()]
        self.call("Emulation.setEmulatedMedia", features=features)
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url="about:blank")  # or another #… would not load it anew
        self.call("Page.navigate", url=url)
        deadline = time.monotonic() + self.seconds
        while not self.run("location.href !== 'about:blank' && document.readyState === 'complete'"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"{url} did not load")
            time.sleep(0.05)

    def run(self, script: str):
        """The value of a JavaScript expression, a promise's once it is there."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def press(self, key: str, shift: bool = False) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=8 * shift)

    def type(self, text: str) -> None:
        """Into whatever has the focus, as a keyboard or an input method does."""
        self.call("Input.insertText", text=text)

    def middle(self, selector: str) -> list[float]:
        """Where in the window the element's middle is, once it is scrolled into sight."""
        return self.run(f"""(() => {{
            const element = document.querySelector({json.dumps(selector)});
            element.scrollIntoView({{ block: "center" }});
            const box = element.getBoundingClientRect();
            return [box.x + box.width / 2, box.y + box.height / 2];
        }})()""")

    def click(self, selector: str) -> None:
        """With the mouse, in the middle of the element."""
        x, y = self.middle(selector)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def drag(self, selector: str, by: tuple[float, float]) -> None:
        """With the mouse, from the middle of the element so many pixels right and down."""
        x, y = self.middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        places = [(x + part * by[0], y + part * by[1]) for part in (0, 0.5, 1)]
        kinds = ("mousePressed", "mouseMoved", "mouseMoved")
        for kind, (x, y) in zip(kinds, places, strict=True):
            about = {"x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **about)
        self.call("Input.dispatchMouseEvent", **{**about, "type": "mouseReleased"})

    def screenshot(self, path: Path, width: int | None = None, height: int | None = None) -> None:
        """Of the whole page, or of its top, as PNG."""
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "scale": 1}
        clip |= {"width": width or size["width"], "height": height or size["height"]}
        image = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))

    def close(self) -> None:
        self.session = None
        try:
            self.call("Browser.close")
        except (OSError, EOFError, TimeoutError):
            self.process.kill()
        self.process.wait(timeout=30)
        os.close(self.to)
        os.close(self.back)

    def _receive(self) -> dict:
        deadline = time.monotonic() + self.seconds
        while b"\0" not in self.rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.back], [], [], left)[0]:
                raise TimeoutError("the browser does not answer")
            piece = os.read(self.back, 1 << 16)
            if not piece:
                raise EOFError("the browser has ended")
            self.rest += piece
        message, self.rest = self.rest.split(b"\0", 1)
        return json.loads(message)

    def _note(self, event: dict) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.errors.append(details.get("exception", details).get("description", str(details)))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            entry = params["entry"]
            self.errors.append(" ".join(filter(None, (entry["text"], entry.get("url")))))
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] == "error":
            self.errors.append(str([x.get("value") for x in params["args"]]))
        elif event.get("method") == "Network.requestWillBeSent":
            url = params["request"]["url"]
            if not url.startswith(("file:", "data:", "about:")):
                self.errors.append(f"asked the network for {url}")
