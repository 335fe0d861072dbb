// A canvas that fits its box, is sharp on every screen, and is drawn again when the size or the colours change.
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import type { ComponentChildren } from "preact";
import { useScheme } from "../theme";

/** A place on the canvas, with the canvas's width. */
export interface Point {
  x: number;
  y: number;
  width: number;
}

export interface CanvasProps {
  label: string;
  height: number;
  draw: (pen: CanvasRenderingContext2D, width: number, height: number) => void;
  onHover?: (at: Point | null) => void;
  onClick?: (at: Point) => void;
  onDrag?: (from: Point, to: Point, done: boolean) => void;
  onWheel?: (at: Point, amount: number) => void;
  /** Shown next to the pointer. */
  tip?: ComponentChildren;
  cursor?: string;
}

export function Canvas({ label, height, draw, onHover, onClick, onDrag, onWheel, tip, cursor }: CanvasProps) {
  const canvas = useRef<HTMLCanvasElement>(null);
  const [width, setWidth] = useState(0);
  const [pointer, setPointer] = useState<Point | null>(null);
  const pressed = useRef<Point | null>(null);
  const scheme = useScheme();

  useEffect(() => {
    const box = canvas.current!.parentElement!;
    const observer = new ResizeObserver(() => setWidth(box.clientWidth));
    observer.observe(box);
    return () => observer.disconnect();
  }, []);

  useLayoutEffect(() => {
    const element = canvas.current!;
    const scale = devicePixelRatio || 1;
    if (width === 0) return;
    element.width = Math.round(width * scale);
    element.height = Math.round(height * scale);
    const pen = element.getContext("2d")!;
    pen.scale(scale, scale);
    pen.font = "11px system-ui, sans-serif";
    pen.textBaseline = "middle";
    draw(pen, width, height);
  }, [draw, width, height, scheme]);

  // A listener added by Preact would be passive, and the page would scroll while the chart zooms.
  useEffect(() => {
    if (!onWheel) return;
    const element = canvas.current!;
    const listen = (event: WheelEvent) => {
      if (!event.ctrlKey && !event.metaKey && Math.abs(event.deltaX) > Math.abs(event.deltaY)) return;
      event.preventDefault();
      onWheel(place(event), event.deltaY);
    };
    element.addEventListener("wheel", listen, { passive: false });
    return () => element.removeEventListener("wheel", listen);
  }, [onWheel]);

  const place = (event: MouseEvent): Point => {
    const box = canvas.current!.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top, width: box.width };
  };
  const move = (event: PointerEvent) => {
    const at = place(event);
    setPointer(at);
    if (pressed.current && onDrag) onDrag(pressed.current, at, false);
    else onHover?.(at);
  };
  const release = (event: PointerEvent) => {
    const from = pressed.current;
    pressed.current = null;
    if (!from) return;
    const to = place(event);
    if (onDrag && Math.abs(to.x - from.x) > 3) onDrag(from, to, true);
    else onClick?.(to);
  };
  return (
    <div class="canvas" style={{ height: `${height}px` }}>
      <canvas
        ref={canvas}
        role="img"
        aria-label={label}
        style={{ height: `${height}px`, cursor: cursor ?? (onClick || onDrag ? "crosshair" : "default") }}
        onPointerDown={(event: PointerEvent) => {
          pressed.current = place(event);
          if (onDrag) canvas.current!.setPointerCapture(event.pointerId);
        }}
        onPointerMove={move}
        onPointerUp={release}
        onPointerLeave={() => {
          setPointer(null);
          onHover?.(null);
        }}
      />
      {tip && pointer ? (
        <div class="tip" style={tipPlace(pointer)}>
          {tip}
        </div>
      ) : null}
    </div>
  );
}

/** Right of the pointer, or left of it where the right has no room. */
function tipPlace(pointer: Point): Record<string, string> {
  const top = `${pointer.y + 14}px`;
  return pointer.x > pointer.width / 2 ? { top, right: `${pointer.width - pointer.x + 10}px` } : { top, left: `${pointer.x + 10}px` };
}
