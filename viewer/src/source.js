// For a served page: fetches the profile for the selected time range and resource.

const REFRESH_MS = 5000;

// Fetches the data of profile.js; throws the server's error message.
async function fetchProfile(address, query) {
  const answer = await fetch(`${address}?${query}`, { cache: "no-store" });
  const said = await answer.json().catch(() => ({ error: `${answer.status} ${answer.statusText}` }));
  if (!answer.ok) throw new Error(said.error);
  return said;
}

// Calls `loaded` with all data received; errors are shown in the bar.
export function follow(address, element, loaded) {
  const [bar, last, resource, status, refresh, pause] = [
    "live", "last", "resource", "status", "refresh", "pause",
  ].map(element);
  let number = 0;
  let timer = 0;
  let isLive = false;

  async function load() {
    clearTimeout(timer);
    const own = (number += 1);
    const query = new URLSearchParams();
    if (last.value) query.set("last", last.value);
    if (resource.value) query.set("resource", resource.value);
    status.textContent = "loading …";
    try {
      const data = await fetchProfile(address, query);
      if (own !== number) return; // superseded by a later request
      status.textContent = "";
      isLive = Boolean(data.live);
      fillResources(data.resources ?? []);
      pause.hidden = !isLive;
      bar.hidden = !isLive && !data.available && resource.options.length < 3; // nothing to choose
      loaded(data);
    } catch (error) {
      if (own !== number) return;
      status.textContent = error.message;
    }
    if (isLive && pause.getAttribute("aria-pressed") !== "true") timer = setTimeout(load, REFRESH_MS);
  }

  function fillResources(resources) {
    const { value } = resource;
    resource.replaceChildren(
      new Option("all resources", ""),
      ...resources.map(({ id, name, samples }) => new Option(`${name} · ${samples.toLocaleString("en-US")}`, id)),
    );
    resource.value = resources.some(({ id }) => String(id) === value) ? value : "";
    resource.parentElement.hidden = resources.length < 2;
  }

  bar.hidden = false;
  last.addEventListener("change", load);
  resource.addEventListener("change", load);
  refresh.addEventListener("click", load);
  pause.addEventListener("click", () => {
    const pauses = pause.getAttribute("aria-pressed") !== "true";
    pause.setAttribute("aria-pressed", pauses);
    if (pauses) clearTimeout(timer);
    else load();
  });
  load();
}
