// The page of channels: its data stand in it, and its address says which channel is chosen.
const page = document.querySelector(".p-channels");
const follow = readChannels(page, JSON.parse(page.querySelector('script[type="application/json"]').textContent), {
  read: () => (location.hash.match(/^#l(\d+)c(\d+)$/) || []).slice(1),
  write: (layer, channel) => {
    try {
      history.replaceState(null, "", `#l${layer}c${channel}`);
    } catch {
      // A page that is framed may not change its address.
    }
  },
});
addEventListener("hashchange", follow);
page.dataset.ready = "yes";
