// Runs before the page is drawn, so that a chosen colour scheme does not flash.
try {
  const theme = localStorage.getItem("saccade-theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // The page has no access to storage, so the system's colour scheme is used.
}
