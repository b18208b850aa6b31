// Follows Airflow's theme, and without one the system's. Loaded before the page is drawn, so that nothing flashes.
"use strict";
{
  const system = matchMedia("(prefers-color-scheme: dark)");

  /** Return the page of Airflow around this one, null if there is none. */
  const airflowPage = () => {
    try {
      return window.parent === window ? null : window.parent.document.documentElement;
    } catch {
      return null; // of another origin
    }
  };

  const storedTheme = () => {
    try {
      return localStorage.getItem("theme"); // where Airflow keeps its users' choice
    } catch {
      return null;
    }
  };

  const around = airflowPage();

  const isDark = () => {
    if (around?.classList.contains("dark")) return true;
    if (around?.classList.contains("light")) return false;
    const stored = storedTheme();
    return stored === "dark" || (stored !== "light" && system.matches);
  };

  const follow = () => {
    const theme = isDark() ? "dark" : "light";
    if (document.documentElement.dataset.theme === theme) return;
    document.documentElement.dataset.theme = theme;
    document.dispatchEvent(new Event("themechange"));
  };

  follow();
  system.addEventListener("change", follow);
  window.addEventListener("storage", follow);
  if (around) new MutationObserver(follow).observe(around, { attributeFilter: ["class"] });
}
