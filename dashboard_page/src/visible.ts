import { useEffect, useRef, useState } from "preact/hooks";

/** Whether an element is on the screen, or close to it. */
export function useIsVisible(margin = "200px"): [preact.RefObject<HTMLElement | null>, boolean] {
  const box = useRef<HTMLElement>(null);
  const [isVisible, setVisible] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver(([entry]) => setVisible(entry!.isIntersecting), { rootMargin: margin });
    observer.observe(box.current!);
    return () => observer.disconnect();
  }, []);
  return [box, isVisible];
}
