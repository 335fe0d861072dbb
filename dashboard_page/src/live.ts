// One stream of server-sent events for the whole page. Views fetch again when the run has changed.
import { useEffect, useState } from "preact/hooks";
import { apiPath } from "./api";

export type Connection = "connecting" | "live" | "lost";

interface Live {
  connection: Connection;
  /** Grows when the run has changed. */
  tick: number;
  /** Why the run cannot be read, in words. */
  problem: string | null;
  step: number | null;
  state: string | null;
}

let live: Live = { connection: "connecting", tick: 0, problem: null, step: null, state: null };
const listeners = new Set<() => void>();
let source: EventSource | null = null;
let address = "";

function update(change: Partial<Live>): void {
  live = { ...live, ...change };
  for (const listen of listeners) listen();
}

/** Follow the run that the address bar names. */
export function connect(): void {
  const wanted = apiPath("events");
  if (source && wanted === address) return;
  source?.close();
  address = wanted;
  live = { connection: "connecting", tick: live.tick + 1, problem: null, step: null, state: null };
  source = new EventSource(wanted);
  // After a lost connection something may have changed that no event reports.
  source.onopen = () => update({ connection: "live", tick: live.connection === "lost" ? live.tick + 1 : live.tick });
  source.onerror = () => update({ connection: "lost" });
  source.addEventListener("changed", (event) => {
    const { step, state } = JSON.parse((event as MessageEvent<string>).data) as { step: number | null; state: string | null };
    update({ tick: live.tick + 1, problem: null, step, state });
  });
  source.addEventListener("problem", (event) => {
    update({ problem: (JSON.parse((event as MessageEvent<string>).data) as { text: string }).text });
  });
}

export function useLive(): Live {
  const [value, setValue] = useState(live);
  useEffect(() => {
    const listen = () => setValue(live);
    listeners.add(listen);
    listen();
    return () => void listeners.delete(listen);
  }, []);
  return value;
}

/** A tick that stands still while `isHeld`: rows do not move while somebody reads further down. */
export function useHeldTick(tick: number, isHeld: boolean): number {
  const [shown, setShown] = useState(tick);
  useEffect(() => {
    if (!isHeld) setShown(tick);
  }, [tick, isHeld]);
  return shown;
}

/** The tick, at most once in `interval_ms`: a page with many requests must not load the machine that trains. */
export function useTick(interval_ms = 2000): number {
  const [tick, setTick] = useState(live.tick);
  useEffect(() => {
    let timer: ReturnType<typeof setTimeout> | null = null;
    let shownAt = performance.now();
    const show = () => {
      timer = null;
      shownAt = performance.now();
      setTick(live.tick);
    };
    const listen = () => {
      if (timer === null && !document.hidden) timer = setTimeout(show, Math.max(0, shownAt + interval_ms - performance.now()));
    };
    listeners.add(listen);
    document.addEventListener("visibilitychange", listen);
    return () => {
      listeners.delete(listen);
      document.removeEventListener("visibilitychange", listen);
      if (timer !== null) clearTimeout(timer);
    };
  }, [interval_ms]);
  return tick;
}
