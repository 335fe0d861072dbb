import { useEffect, useRef, useState } from "preact/hooks";

/** Whether an element is on the screen, or close to it. */
export function useIsVisible(): [preact.RefObject<HTMLElement | null>, boolean] {
  const box = useRef<HTMLElement>(null);
  const [isVisible, setVisible] = useState(false);
  useEffect(() => {
    const observer = new IntersectionObserver(([entry]) => setVisible(entry!.isIntersecting), { rootMargin: "200px" });
    observer.observe(box.current!);
    return () => observer.disconnect();
  }, []);
  return [box, isVisible];
}
