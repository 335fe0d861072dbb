// The configuration of the run, what differs from the defaults, and what a resume changed.
import { type Config, apiPath, useResource } from "../api";
import { dateTime, plural } from "../format";
import { Badge, Empty, Loaded, Page, Panel, Segmented } from "../parts/basic";
import { setFilters, useRoute } from "../router";
import { visible } from "../text";

type Show = "changed" | "all" | "toml";

export function ConfigPage() {
  const { query } = useRoute();
  const show = (query.get("show") as Show | null) ?? "changed";
  const like = (query.get("like") ?? "").toLowerCase();
  const config = useResource<Config>(apiPath("config"));
  return (
    <Page title="Config">
      <div class="row">
        <Segmented label="Show" value={show} options={[["changed", "Different from the defaults"], ["all", "All settings"], ["toml", "As TOML"]]} onChange={(value) => setFilters({ show: value === "changed" ? null : value }, { replace: true })} />
        {show === "toml" ? null : <input type="search" aria-label="Find a setting" placeholder="Find a setting" value={query.get("like") ?? ""} onInput={(event) => setFilters({ like: (event.target as HTMLInputElement).value }, { replace: true })} />}
      </div>
      <Loaded from={config}>
        {(data) => (
          <>
            {data.resumes.map((resume, at) => (
              <Panel key={at} title="Changed when the run was resumed" more={resume.at ? dateTime(resume.at) : undefined}>
                {Object.entries(resume.changed).map(([path, [before, after]]) => (
                  <p key={path} class="mono">
                    {path}: {value(before)} → <b>{value(after)}</b>
                  </p>
                ))}
              </Panel>
            ))}
            {show === "toml" ? (
              <Panel>
                <pre>{visible(data.toml)}</pre>
              </Panel>
            ) : (
              <Sections data={data} isOnlyChanged={show === "changed"} like={like} />
            )}
          </>
        )}
      </Loaded>
    </Page>
  );
}

function Sections({ data, isOnlyChanged, like }: { data: Config; isOnlyChanged: boolean; like: string }) {
  const sections = data.sections
    .map(({ name, fields }) => ({ name, fields: fields.filter((field) => (!isOnlyChanged || !field.is_default) && (field.path.toLowerCase().includes(like) || field.meaning.toLowerCase().includes(like))) }))
    .filter(({ fields }) => fields.length);
  if (sections.length === 0) {
    return (
      <Panel>
        <Empty title="No setting to show.">{isOnlyChanged && !like ? "Every setting has its default value." : "No setting matches."}</Empty>
      </Panel>
    );
  }
  return (
    <>
      {sections.map(({ name, fields }) => (
        <Panel key={name} title={name} more={plural(fields.length, "setting")} flush>
          <div class="table-box" tabIndex={0}>
            <table class="settings">
              <thead>
                <tr>
                  <th>Setting</th>
                  <th>Value</th>
                  <th>Default</th>
                  <th>Meaning</th>
                </tr>
              </thead>
              <tbody>
                {fields.map((field) => (
                  <tr key={field.path}>
                    <td class="mono">{field.path}</td>
                    <td class="mono">
                      <b>{value(field.value)}</b> {field.resumed_from === null || field.resumed_from === undefined ? null : <Badge tone="info">was {value(field.resumed_from)}</Badge>}
                    </td>
                    <td class="mono muted">{field.is_default ? "" : value(field.default)}</td>
                    <td class="muted">{field.meaning}</td>
                  </tr>
                ))}
              </tbody>
            </table>
          </div>
        </Panel>
      ))}
    </>
  );
}

function value(of: unknown): string {
  if (of === null || of === undefined) return "not set";
  return visible(typeof of === "string" ? of : JSON.stringify(of));
}
