"""Headless Chromium, driven through its own debugging protocol, over a WebSocket."""

import base64
import json
import shutil
import subprocess
import time
from pathlib import Path

import websocket

OPTIONS = (
    "--headless --no-sandbox --disable-gpu --disable-dev-shm-usage --no-first-run "
    "--disable-background-networking --disable-extensions --hide-scrollbars "
    "--proxy-server=127.0.0.1:9 --remote-debugging-port=0"  # nobody answers at port 9
)


def chromium() -> str | None:
    """The browser's command, if there is one."""
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser"))), None)


class Browser:
    """One page of a browser without windows, network or profile.

    (https://chromedevtools.github.io/devtools-protocol)
    """

    def __init__(self, profile: Path, seconds: float = 60):
        self.process = subprocess.Popen(
            [chromium(), *OPTIONS.split(), f"--user-data-dir={profile}"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.seconds, self.number, self.session = seconds, 0, None
        written = profile / "DevToolsActivePort"  # the port, and the path of its address
        self._until(lambda: written.exists() and "/" in written.read_text())
        address = "".join(written.read_text().split())
        self.socket = websocket.create_connection(
            f"ws://127.0.0.1:{address}", timeout=seconds, suppress_origin=True
        )
        # What scripts threw, what the console calls an error, what was asked of the network.
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params) -> dict:
        """What the browser answers; a RuntimeError where it answers with an error, and a
        TimeoutError after self.seconds, however much else it says."""
        deadline = time.monotonic() + self.seconds
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        self.socket.send(json.dumps(message))
        while (answer := self._receive(deadline, method)).get("id") != self.number:
            self._note(answer)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']['message']}")
        return answer["result"]

    def _receive(self, deadline: float, method: str) -> dict:
        try:
            self.socket.settimeout(max(deadline - time.monotonic(), 1e-3))
            return json.loads(self.socket.recv())
        except websocket.WebSocketTimeoutException:
            raise TimeoutError(f"{method}: no answer in {self.seconds} seconds") from None

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
        self.wait("location.href !== 'about:blank' && document.readyState === 'complete'")

    def wait(self, script: str):
        """The first value of the expression that is true."""
        return self._until(lambda: self.run(script))

    def _until(self, there):
        deadline = time.monotonic() + self.seconds
        while not (value := there()):
            if time.monotonic() > deadline:
                raise TimeoutError("the browser, or a page in it, does not get ready")
            time.sleep(0.05)
        return value

    def run(self, script: str):
        """The value of a JavaScript expression, a promise's once it is there."""
        result = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    def press(self, key: str) -> None:
        for kind in ("rawKeyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

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

    def drag(self, selector: str, by: tuple[float, float] = (0, 0)) -> None:
        """With the mouse, from the middle of the element so many pixels right and down; by none,
        this is a click."""
        x, y = self.middle(selector)
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        places = [(x + part * by[0], y + part * by[1]) for part in (0, 0.5, 1)]
        kinds = ("mousePressed", "mouseMoved", "mouseMoved")
        for kind, (x, y) in zip(kinds, places, strict=True):
            about = {"x": x, "y": y, "button": "left", "buttons": 1, "clickCount": 1}
            self.call("Input.dispatchMouseEvent", type=kind, **about)
        self.call("Input.dispatchMouseEvent", **{**about, "type": "mouseReleased"})

    def screenshot(self, path: Path, width: int, height: int) -> None:
        """Of the top of the page, as PNG."""
        clip = {"x": 0, "y": 0, "scale": 1, "width": width, "height": height}
        image = self.call("Page.captureScreenshot", clip=clip, captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(image["data"]))

    def close(self) -> None:
        self.session = None
        try:
            self.call("Browser.close")
        except (OSError, websocket.WebSocketException):
            self.process.kill()
        self.process.wait(timeout=30)

    def _note(self, event: dict) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"].get("exception", params)))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.errors.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            case "Runtime.consoleAPICalled" if params["type"] == "error":
                self.errors.append(str([x.get("value") for x in params["args"]]))
            case "Network.requestWillBeSent":
                url = params["request"]["url"]
                if not url.startswith(("file:", "data:", "about:")):
                    self.errors.append(f"asked the network for {url}")
