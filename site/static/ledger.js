// The filters of the ledger's page: its rows are hidden and shown, nothing is fetched.
"use strict";

{
  const form = document.querySelector("#ledger-filters");
  const rows = [...document.querySelectorAll("a.row")].map((anchor) => {
    const tr = anchor.closest("tr");
    const last = tr.cells[tr.cells.length - 1];
    const places = [...last.querySelectorAll("a")].map((a) => a.textContent.split(",")[0]);
    const text = [...tr.cells].slice(0, -1).map((cell) => cell.innerText).join("\n");
    return { tr, anchor, places, text };
  });

  // A pattern for whole words. Chinese has no blanks: its characters are words anywhere.
  function pattern(words) {
    const literal = words.replace(/[.*+?^${}()|[\]\\/]/g, "\\$&").replace(/\s+/g, "\\s+");
    const before = /^\p{Script=Han}/u.test(words) ? "" : "(?<![\\p{L}\\p{N}_])";
    const after = /\p{Script=Han}$/u.test(words) ? "" : "(?![\\p{L}\\p{N}_])";
    return new RegExp(before + literal + after, "iu");
  }

  function show() {
    const { find, source, verdict, notebook } = form.elements;
    const words = find.value.trim();
    const wanted = words ? pattern(words) : null;
    let shown = 0;
    for (const { tr, anchor, places, text } of rows) {
      const here =
        (!wanted || wanted.test(text)) &&
        (!source.value || anchor.dataset.source === source.value) &&
        (!verdict.value || anchor.dataset.verdict === verdict.value) &&
        (!notebook.value || places.includes(notebook.value));
      tr.hidden = !here;
      shown += here;
    }
    for (const table of document.querySelectorAll("table")) {
      const own = table.querySelectorAll("a.row");
      if (!own.length) continue;
      const none = ![...own].some((anchor) => !anchor.closest("tr").hidden);
      (table.closest("section") ?? table).hidden = none;
    }
    form.querySelector("output").textContent = `${shown} of ${rows.length} rows`;
    // The address keeps the search, so that it can be linked.
    const query = new URLSearchParams([...new FormData(form)].filter(([, value]) => value));
    const address = new URL(location);
    address.search = query;
    if (address.href !== location.href) history.replaceState(null, "", address);
  }

  // A link to a row that a filter hides shows all rows again.
  function visit() {
    const target = document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (target?.closest("tr")?.hidden) {
      form.reset();
      show();
      target.scrollIntoView();
    }
  }

  for (const [name, value] of new URLSearchParams(location.search)) {
    if (form.elements[name]) form.elements[name].value = value;
  }
  form.hidden = false;
  form.addEventListener("input", show);
  form.addEventListener("submit", (event) => event.preventDefault());
  form.addEventListener("reset", () => setTimeout(show));
  form.addEventListener("keydown", (event) => {
    if (event.key === "Escape") form.reset();
  });
  addEventListener("hashchange", visit);
  show();
  visit();
}
