// Every trained step, newest first.
import { type StepRow, type Steps, apiPath, useMore, useResource } from "../api";
import { clock, count, duration, fixed, number, percent } from "../format";
import { useHeldTick, useTick } from "../live";
import { Badge, Empty, LoadMore, Loaded, Page, Panel } from "../parts/basic";
import { go, href } from "../router";

export function StepsPage() {
  const path = apiPath("steps", { limit: 100 });
  const older = useMore<Steps>(path);
  // Later first pages would leave a gap before the older ones.
  const first = useResource<Steps>(path, useHeldTick(useTick(3000), older.isLoading || older.pages.length > 0));
  const oldest = older.pages.at(-1) ?? first.data;
  const rows = [...(first.data?.steps ?? []), ...older.pages.flatMap((page) => page.steps)];
  return (
    <Page title="Steps" about="One row per trained batch. A step opens its batch: what each sample waited for and which version generated it.">
      <Loaded from={first}>
        {() =>
          rows.length === 0 ? (
            <Panel>
              <Empty title="No step was trained yet.">The first row appears when the first batch is trained.</Empty>
            </Panel>
          ) : (
            <Panel flush>
              <StepTable rows={rows} />
              {oldest?.next_before ? <LoadMore more={older} path={apiPath("steps", { limit: 100, before: oldest.next_before })} label="Load older steps" /> : null}
            </Panel>
          )
        }
      </Loaded>
    </Page>
  );
}

function StepTable({ rows }: { rows: StepRow[] }) {
  return (
    <div class="table-box" tabIndex={0}>
      <table class="tight">
        <thead>
          <tr>
            <th class="num">Step</th>
            <th>Time</th>
            <th class="num">Reward</th>
            <th class="num">Solved</th>
            <th class="num">Lag (max)</th>
            <th class="num">Waited</th>
            <th class="num">Trained</th>
            <th class="num">Tokens</th>
            <th class="num">Response</th>
            <th class="num">Truncated</th>
            <th class="num">Loss</th>
            <th class="num">Grad norm</th>
            <th class="num">Entropy</th>
            <th class="num">KL</th>
            <th>Checkpoint</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row) => (
            <tr key={row.step} class="link" onClick={(event) => !(event.target as Element).closest("a") && go(href("steps", [row.step]))}>
              <td class="num">
                <a href={href("steps", [row.step])}>{row.step}</a>
              </td>
              <td class="nowrap muted">{clock(row.time)}</td>
              <td class="num">{fixed(row.reward, 3)}</td>
              <td class="num">{percent(row.solved)}</td>
              <td class="num nowrap">
                {fixed(row.lag_mean, 1)} ({number(row.lag_max)})
              </td>
              <td class="num nowrap">{duration(row.wait_s)}</td>
              <td class="num nowrap">{duration(row.train_s)}</td>
              <td class="num">{count(row.tokens)}</td>
              <td class="num">{fixed(row.response_tokens, 1)}</td>
              <td class="num">{percent(row.truncated)}</td>
              <td class="num">{fixed(row.loss, 4)}</td>
              <td class="num">{fixed(row.grad_norm, 3)}</td>
              <td class="num">{fixed(row.entropy, 3)}</td>
              <td class="num">{(row.kl ?? row.step_kl)?.toExponential(1) ?? "–"}</td>
              <td>
                {row.is_durable ? <Badge tone="good">durable</Badge> : <span class="muted">not yet</span>}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}
