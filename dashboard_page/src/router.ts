// The address of a view is its path and filters: `/rollouts?state=dropped`. A copied link opens the same view.
import { useEffect, useState } from "preact/hooks";

export interface Route {
  page: string;
  /** What follows the page: the id of a group, the number of a sample. */
  parts: string[];
  query: URLSearchParams;
}

export type Filters = Record<string, string | number | null | undefined>;

export function currentRoute(): Route {
  const [page = "overview", ...parts] = location.pathname.split("/").filter(Boolean).map(decode);
  return { page, parts, query: new URLSearchParams(location.search) };
}

/** The link to a view. The selected run stays selected; empty filters are left out. */
export function href(page: string, parts: (string | number)[] = [], filters: Filters | URLSearchParams = {}): string {
  const query = new URLSearchParams();
  const entries = filters instanceof URLSearchParams ? [...filters] : Object.entries(filters);
  for (const [name, value] of entries) if (value !== null && value !== undefined && value !== "") query.set(name, String(value));
  const run = new URLSearchParams(location.search).get("run");
  if (run && !query.has("run")) query.set("run", run);
  const path = [page, ...parts].map((part) => encodeURIComponent(String(part))).join("/");
  return `/${path}${query.size ? `?${query}` : ""}`;
}

/** The link to a view that the server describes by its path and filters. */
export function linkTo(pathAndQuery: string): string {
  const [path, query = ""] = pathAndQuery.split("?", 2) as [string, string?];
  const [page = "overview", ...parts] = path.split("/").filter(Boolean).map(decode);
  return href(page, parts, new URLSearchParams(query));
}

/** Change filters of the current view. The Back button undoes it, except with `replace`. */
export function setFilters(changes: Filters, options: { replace?: boolean } = {}): void {
  const { page, parts, query } = currentRoute();
  for (const [name, value] of Object.entries(changes)) {
    if (value === null || value === undefined || value === "") query.delete(name);
    else query.set(name, String(value));
  }
  go(href(page, parts, query), options);
}

export function go(link: string, { replace = false } = {}): void {
  if (replace) history.replaceState(null, "", link);
  else history.pushState(null, "", link);
  dispatchEvent(new PopStateEvent("popstate"));
}

export function useRoute(): Route {
  const [route, setRoute] = useState(currentRoute);
  useEffect(() => {
    const update = () => setRoute(currentRoute());
    const follow = (event: MouseEvent) => {
      const link = (event.target as Element).closest?.("a");
      const opensElsewhere = event.button !== 0 || event.metaKey || event.ctrlKey || event.shiftKey || event.altKey;
      if (!link || opensElsewhere || event.defaultPrevented) return;
      if (link.origin !== location.origin || link.hash || link.pathname.startsWith("/api/")) return;
      event.preventDefault();
      go(link.href);
      scrollTo(0, 0);
    };
    addEventListener("popstate", update);
    document.addEventListener("click", follow);
    return () => {
      removeEventListener("popstate", update);
      document.removeEventListener("click", follow);
    };
  }, []);
  return route;
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // A hand-edited link may contain a lone percent sign.
  }
}
