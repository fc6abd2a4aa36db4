// A stepper's frame is as high as the page in it, which tells how high that is.
"use strict";

addEventListener("message", ({ data, source }) => {
  for (const frame of document.querySelectorAll("iframe.stepper")) {
    if (frame.contentWindow !== source || !Number.isFinite(data.height)) continue;
    frame.style.height = `${data.height + frame.offsetHeight - frame.clientHeight}px`;
  }
});
