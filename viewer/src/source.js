// Where the page is served: fetches the profile with the query of the page itself.

// The data of profile.js; fails with what the server says.
export async function fetchProfile(address, query = location.search) {
  const answer = await fetch(address + query, { cache: "no-store" });
  const said = await answer.json().catch(() => ({ error: `${answer.status} ${answer.statusText}` }));
  if (!answer.ok) throw new Error(said.error);
  return said;
}
