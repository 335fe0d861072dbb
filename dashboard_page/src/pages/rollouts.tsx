// The list of groups, with filters in the address.
import { useEffect, useRef, useState } from "preact/hooks";
import { type GroupRow, type Groups, apiPath, useMore, useResource } from "../api";
import { FILTERS, type FilterName, LABELS, filterText, onlyFilters, toggled } from "../filters";
import { clock, count, dateTime, duration, fixed, number, percent, plural, words } from "../format";
import { useKeys } from "../keys";
import { useHeldTick, useTick } from "../live";
import { Empty, LoadMore, Loaded, NamedTask, Notice, Page, Panel, State } from "../parts/basic";
import { Histogram } from "../parts/histogram";
import { type Filters, go, href, setFilters, useRoute } from "../router";
import { visible } from "../text";

const LIMIT = 50;
const ORDERS: [string, string][] = [["newest", "newest first"], ["oldest", "oldest first"], ["-reward", "highest reward"], ["reward", "lowest reward"], ["-tokens", "longest"], ["tokens", "shortest"], ["-seconds", "slowest"], ["seconds", "fastest"]];
const FACETS: [FilterName, string][] = [["state", "State"], ["solved", "Solved"], ["drop", "Drop reason"], ["end", "Ended by"], ["tier", "Tier"]];
const RANGES: [FilterName, string, string][] = [["step", "Step", "10-20"], ["tokens", "Tokens", "10:500"], ["turns", "Turns", "2:4"], ["lag", "Lag", "0:1"], ["seconds", "Seconds", "1:20"]];

export function RolloutsPage() {
  const { query } = useRoute();
  const filters = onlyFilters(query);
  const path = apiPath("groups", { ...filters, limit: LIMIT });
  const more = useMore<Groups>(path);
  const [chosen, setChosen] = useState(-1);
  const isBrowsing = more.isLoading || more.pages.length > 0 || chosen >= 0;
  const first = useResource<Groups>(path, useHeldTick(useTick(3000), isBrowsing));
  useEffect(() => setChosen(-1), [path]);
  const pages = first.data ? [first.data, ...more.pages] : [];
  const rows = pages.flatMap((page) => page.groups);
  const cursor = pages.at(-1)?.next_cursor ?? null;
  const search = useRef<HTMLInputElement>(null);
  const open = (row: GroupRow | undefined) => row && go(rowLink(row, filters));
  useKeys({
    j: () => setChosen((at) => Math.min(rows.length - 1, at + 1)),
    k: () => setChosen((at) => Math.max(0, at - 1)),
    Enter: () => open(rows[chosen]),
    "/": () => search.current?.focus(),
  });
  useEffect(() => {
    document.querySelector("tr.chosen")?.scrollIntoView({ block: "nearest" });
  }, [chosen]);

  return (
    <Page
      title="Rollouts"
      about={
        <>
          <kbd>j</kbd> <kbd>k</kbd> move, <kbd>Enter</kbd> opens, <kbd>/</kbd> searches. Drag over the histogram to select rewards.
        </>
      }
    >
      <Loaded from={first}>
        {(data) => (
          <>
            <Panel>
              <div class="filters">
                <div class="stack">
                  <div class="row">
                    <SearchField name="text" label="Search in messages and ids" value={filters.text ?? ""} field={search} wide />
                    <SearchField name="task_like" label="Task id" value={filters.task_like ?? ""} />
                    <label class="field">
                      Order
                      <select value={filters.order ?? "newest"} onChange={(event) => setFilters({ order: keepUnless((event.target as HTMLSelectElement).value, "newest") })}>
                        {ORDERS.map(([value, label]) => (
                          <option key={value} value={value}>
                            {label}
                          </option>
                        ))}
                      </select>
                    </label>
                  </div>
                  {FACETS.map(([name, label]) => (
                    <Facet key={name} name={name} label={label} counts={data.facets[name] ?? {}} value={filters[name] ?? null} />
                  ))}
                  <div class="row">
                    {RANGES.map(([name, label, example]) => (
                      <SearchField key={name} name={name} label={label} value={filters[name] ?? ""} placeholder={example} narrow />
                    ))}
                  </div>
                </div>
                <RewardFilter data={data} value={filters.reward ?? null} />
              </div>
            </Panel>
            <Chips filters={filters} />
            {!data.index.is_complete ? (
              <Notice tone="warn" title="The index is being built.">
                {count(data.index.indexed)} of {count(data.index.total)} groups are listed so far.
              </Notice>
            ) : null}
            <Panel flush>
              <div class="panel-head">
                <h2>{data.total === data.total_all ? plural(data.total, "group") : `${count(data.total)} of ${plural(data.total_all, "group")}`}</h2>
                {data.searched ? (
                  <span class="muted">
                    {data.searched.is_complete ? `all ${count(data.searched.groups)} searched` : `newest ${count(pages.reduce((sum, page) => sum + (page.searched?.groups ?? 0), 0))} searched`}
                  </span>
                ) : null}
              </div>
              {rows.length === 0 ? (
                <Empty title={data.total_all === 0 ? "No groups yet." : "No group matches these filters."}>{data.total_all === 0 ? "The first group appears here when it is dispatched." : <a href={href("rollouts")}>Clear all filters</a>}</Empty>
              ) : (
                <GroupTable rows={rows} chosen={chosen} filters={filters} />
              )}
              {cursor ? <LoadMore more={more} path={apiPath("groups", { ...filters, limit: LIMIT, cursor })} label={data.searched && !data.searched.is_complete ? "Search further back" : "Load more"} /> : null}
            </Panel>
          </>
        )}
      </Loaded>
    </Page>
  );
}

/** A group opens as its first rollout where its samples are stored, else as a group. */
export function rowLink(row: GroupRow, filters: Filters): string {
  return row.has_payload ? href("rollout", [row.group_id, 0], filters) : href("group", [row.group_id], filters);
}

function keepUnless(value: string, standard: string): string | null {
  return value === standard ? null : value;
}

function SearchField({ name, label, value, placeholder, field, wide, narrow }: { name: FilterName; label: string; value: string; placeholder?: string; field?: preact.RefObject<HTMLInputElement | null>; wide?: boolean; narrow?: boolean }) {
  return (
    <label class="field">
      {narrow ? label : <span class="visually-hidden">{label}</span>}
      <input
        ref={field}
        type="search"
        class={wide ? "wide" : narrow ? "narrow" : ""}
        placeholder={placeholder ?? label}
        defaultValue={value}
        key={value}
        onChange={(event) => setFilters({ [name]: (event.target as HTMLInputElement).value.trim() })}
      />
    </label>
  );
}

function Facet({ name, label, counts, value }: { name: FilterName; label: string; counts: Record<string, number>; value: string | null }) {
  const chosen = new Set((value ?? "").split(",").filter(Boolean));
  const options = [...new Set([...Object.keys(counts).filter((option) => counts[option]), ...chosen])];
  if (options.length === 0) return null;
  return (
    <div class="row" role="group" aria-label={label}>
      <span class="facet-name">{label}</span>
      {options.map((option) => (
        <button key={option} class="button small" aria-pressed={chosen.has(option)} onClick={() => setFilters({ [name]: toggled(value, option) })}>
          {words(option)} <span class="muted">{count(counts[option] ?? 0)}</span>
        </button>
      ))}
    </div>
  );
}

function RewardFilter({ data, value }: { data: Groups; value: string | null }) {
  const { edges, counts, all } = data.histogram;
  const [low, high] = (value ?? "").split(":", 2);
  const bound = (text: string | undefined) => (text ? Number(text) : null);
  const write = (from: string, to: string) => setFilters({ reward: from || to ? `${from}:${to}` : null });
  if (counts.length === 0) return <Empty title="No rewards yet." />;
  return (
    <div class="reward-filter">
      <div class="row between">
        <h3>Mean reward of the group</h3>
        <span class="row small">
          <label class="field">
            from <input type="search" class="narrow" defaultValue={low} key={`l${low}`} onChange={(event) => write((event.target as HTMLInputElement).value.trim(), high ?? "")} />
          </label>
          <label class="field">
            to <input type="search" class="narrow" defaultValue={high} key={`h${high}`} onChange={(event) => write(low ?? "", (event.target as HTMLInputElement).value.trim())} />
          </label>
        </span>
      </div>
      <Histogram
        label="Groups by mean reward"
        edges={edges}
        counts={counts}
        all={all}
        selected={value ? [bound(low), bound(high)] : null}
        onSelect={(range) => setFilters({ reward: range ? `${number(range[0], 6)}:${number(range[1], 6)}` : null })}
      />
    </div>
  );
}

export function Chips({ filters }: { filters: Record<string, string> }) {
  const shown = FILTERS.filter((name) => name !== "order" && filters[name]);
  if (shown.length === 0) return null;
  return (
    <div class="row" role="group" aria-label="Active filters">
      {shown.map((name) => (
        <span class="chip" key={name}>
          <span>{visible(filterText(name, filters[name]!))}</span>
          <button aria-label={`Remove the filter ${LABELS[name]}`} onClick={() => setFilters({ [name]: null })}>
            ×
          </button>
        </span>
      ))}
      <a class="small" href={href("rollouts")}>
        Clear all
      </a>
    </div>
  );
}

function GroupTable({ rows, chosen, filters }: { rows: GroupRow[]; chosen: number; filters: Record<string, string> }) {
  const hasTiers = rows.some((row) => row.tier);
  return (
    <div class="table-box" tabIndex={0}>
      <table>
        <thead>
          <tr>
            <th>Task and group</th>
            {hasTiers ? <th>Tier</th> : null}
            <th>State</th>
            <th class="num">Step</th>
            <th class="num">Lag</th>
            <th class="num">Reward</th>
            <th>Samples</th>
            <th class="num">Solved</th>
            <th class="num">Tokens</th>
            <th class="num">Turns</th>
            <th class="num">Played in</th>
            <th>Opened</th>
          </tr>
        </thead>
        <tbody>
          {rows.map((row, at) => (
            <tr key={row.group_id} class={`link ${at === chosen ? "chosen" : ""}`} aria-selected={at === chosen} onClick={(event) => !(event.target as Element).closest("a") && go(rowLink(row, filters))}>
              <NamedTask text={row.task_text} id={row.group_id} link={rowLink(row, filters)} />
              {hasTiers ? <td>{row.tier}</td> : null}
              <td>
                <span title={row.drop_reason ?? undefined}>
                  <State state={row.state} detail={row.drop_kind} />
                </span>
              </td>
              <td class="num">{row.step ?? ""}</td>
              <td class="num">{row.lag ?? ""}</td>
              <td class="num">{fixed(row.reward_mean, 3)}</td>
              <td>
                <SampleMarks row={row} filters={filters} />
              </td>
              <td class="num">{percent(row.solved_rate)}</td>
              <td class="num">{number(row.tokens, 1)}</td>
              <td class="num">{number(row.turns, 1)}</td>
              <td class="num nowrap">{duration(row.seconds)}</td>
              <td class="nowrap muted" title={dateTime(row.opened_at)}>
                {clock(row.opened_at)}
              </td>
            </tr>
          ))}
        </tbody>
      </table>
    </div>
  );
}

/** One mark per sample, filled by its reward. */
function SampleMarks({ row, filters }: { row: GroupRow; filters: Record<string, string> }) {
  if (row.samples.length === 0) return <span class="muted">{row.num_samples || ""}</span>;
  const rewards = row.samples.map((sample) => sample.reward).filter((reward): reward is number => reward !== null);
  const low = Math.min(0, ...rewards);
  const high = Math.max(1, ...rewards);
  return (
    <span class="marks">
      {row.samples.slice(0, 32).map((sample, at) => (
        <a
          key={at}
          href={href("rollout", [row.group_id, at], filters)}
          aria-label={`Sample ${at}, ${sample.reward === null ? "not scored" : `reward ${number(sample.reward)}`}`}
          title={`sample ${at}: ${sample.reward === null ? "not scored" : `reward ${number(sample.reward)}`}, ${number(sample.tokens)} tokens, ${words(sample.end ?? "")}`}
          class={`mark ${sample.reward === null ? "unscored" : ""}`}
        >
          <i style={{ height: sample.reward === null ? "0" : `${Math.round(((sample.reward - low) / (high - low)) * 100)}%` }} class={sample.solved ? "solved" : ""} />
        </a>
      ))}
    </span>
  );
}
