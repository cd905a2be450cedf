// Runs before the first paint, so that a chosen theme does not flash.
"use strict";

(() => {
  const ORDER = ["automatic", "light", "dark"];
  const stored = () => {
    try {
      const value = localStorage.getItem("stoop.theme");
      return ORDER.includes(value) ? value : "automatic";
    } catch {
      return "automatic"; // storage may be forbidden
    }
  };
  const apply = (theme) => {
    document.documentElement.dataset.theme = theme;
  };

  apply(stored());
  addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme");
    const label = () => {
      const theme = document.documentElement.dataset.theme;
      button.setAttribute("aria-label", `Theme: ${theme}`);
      button.title = `Theme: ${theme}`;
    };
    label();
    button.addEventListener("click", () => {
      const theme = ORDER[(ORDER.indexOf(document.documentElement.dataset.theme) + 1) % 3];
      apply(theme);
      label();
      try {
        localStorage.setItem("stoop.theme", theme);
      } catch {
        // It then lasts as long as the page.
      }
    });
  });
})();
