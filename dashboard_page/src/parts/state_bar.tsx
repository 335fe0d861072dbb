// The states of all groups as one bar. Each part opens its groups.
import type { Overview } from "../api";
import { count, percent } from "../format";
import { href } from "../router";

export const STATES = ["dispatched", "queued", "batched", "trained", "durable", "dropped"] as const;
export const STATE_COLOURS: Record<string, string> = { dispatched: "series-6", queued: "series-1", batched: "series-4", trained: "series-7", durable: "series-2", dropped: "series-3" };

export function StateBar({ law }: { law: NonNullable<Overview["law"]> }) {
  const total = STATES.reduce((sum, state) => sum + (law.by_state[state] ?? 0), 0);
  return (
    <>
      <div class="state-bar" aria-hidden="true">
        {STATES.map((state) => {
          const n = law.by_state[state] ?? 0;
          return n ? <i key={state} style={{ flexGrow: String(n), background: `var(--${STATE_COLOURS[state]})` }} /> : null;
        })}
      </div>
      <ul class="state-list">
        {STATES.map((state) => (
          <li key={state}>
            <a href={href("rollouts", [], { state })}>
              <i style={{ background: `var(--${STATE_COLOURS[state]})` }} /> {state}
            </a>
            <b>{count(law.by_state[state] ?? 0)}</b>
            <span class="muted">{total ? percent((law.by_state[state] ?? 0) / total, 1) : ""}</span>
          </li>
        ))}
      </ul>
    </>
  );
}
