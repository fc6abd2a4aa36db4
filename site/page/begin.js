const wanted = readAddress();
makeKnobs();
beginWords();
beginOrder(wanted);
beginBreak();
beginPrefix(wanted);
beginVerify();
beginBoth();
beginWire(); // last: it plays
redrawWhen();
// JupyterLab shows the page in a frame, from where links would ask its server for raw files.
if (location.protocol === "blob:") {
  for (const link of document.links) set(link, { href: link.href.replace("/files/", "/lab/tree/"), target: "_blank" });
}
