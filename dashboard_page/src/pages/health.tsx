// What went wrong: warnings, failures by cause, restarts, last lines of stderr, stacks.
import { type Health, apiPath, useResource } from "../api";
import { clock, count, dateTime, duration, plural } from "../format";
import { useTick } from "../live";
import { Badge, Empty, Loaded, Notice, Page, Panel } from "../parts/basic";
import { visible } from "../text";

export function HealthPage() {
  const health = useResource<Health>(apiPath("health"), useTick(4000));
  return (
    <Page title="Health" about="Restarts, failures and the last lines of each process.">
      <Loaded from={health}>
        {(data) => (
          <>
            {Object.entries(data.skipped_lines)
              .filter(([, lines]) => lines)
              .map(([file, lines]) => (
                <Notice key={file} tone="warn">
                  {plural(lines, "line")} of {file} could not be read and {lines === 1 ? "is" : "are"} not shown.
                </Notice>
              ))}
            <div class="grid">
              <Panel span={6} title="Failed episodes by cause" flush>
                {data.failures.length ? (
                  <table>
                    <tbody>
                      {data.failures.map((failure) => (
                        <tr key={failure.cause}>
                          <td>{visible(failure.cause)}</td>
                          <td class="num">{count(failure.count)}</td>
                          <td class="muted">{failure.file ?? ""}</td>
                        </tr>
                      ))}
                    </tbody>
                  </table>
                ) : (
                  <Empty title="No episode failed." />
                )}
              </Panel>
              <Panel span={6} title="Restarts" flush>
                {data.restarts.length ? (
                  <table>
                    <tbody>
                      {data.restarts.map((restart) => (
                        <tr key={`${restart.time} ${restart.process}`}>
                          <td class="muted nowrap">{dateTime(restart.time)}</td>
                          <td>
                            <b>{restart.process}</b>
                          </td>
                          <td>{restart.code === null ? "" : `exit code ${restart.code}`}</td>
                        </tr>
                      ))}
                    </tbody>
                  </table>
                ) : (
                  <Empty title="No process was restarted." />
                )}
              </Panel>
            </div>
            <Panel title="Warnings and errors" more={data.events.length ? plural(data.events.length, "event") : undefined} flush>
              {data.events.length ? (
                <div class="table-box tall" tabIndex={0}>
                  <table>
                    <tbody>
                      {data.events.map((event, at) => (
                        <tr key={at}>
                          <td class="muted nowrap">{clock(event.time)}</td>
                          <td>
                            <Badge tone={/error|critical/i.test(event.level) ? "bad" : "warn"}>{event.level}</Badge>
                          </td>
                          <td>{event.process}</td>
                          <td class="mono">
                            <b>{visible(event.event)}</b> {visible(event.text)}
                          </td>
                        </tr>
                      ))}
                    </tbody>
                  </table>
                </div>
              ) : (
                <Empty title="No warnings." />
              )}
            </Panel>
            {data.silent.length ? (
              <Panel title="Last event of each process" flush>
                <div class="value-grid">
                  {data.silent.map((one) => (
                    <span key={one.process}>
                      <span class="muted">{one.process}</span> <b>{duration(one.silent_s)} ago</b>
                    </span>
                  ))}
                </div>
              </Panel>
            ) : null}
            {data.stacks.map((stack) => (
              <Panel key={`${stack.time} ${stack.process}`} title={`Stacks of ${stack.process}`} more={dateTime(stack.time)}>
                <pre>{visible(stack.text)}</pre>
              </Panel>
            ))}
            {data.stderr
              .filter((one) => one.lines.length)
              .map((one) => (
                <Panel key={one.process} title={`Last lines of ${one.process}`} more="stderr">
                  <pre class="log">{visible(one.lines.join("\n"))}</pre>
                </Panel>
              ))}
          </>
        )}
      </Loaded>
    </Page>
  );
}
