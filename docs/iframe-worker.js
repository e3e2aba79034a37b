/* A browser starts no worker on a page that was opened from a folder, so the search of the site runs in a hidden frame there. */
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      const inside = frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data })); // answers of the worker
      const script = inside.document.createElement("script");
      this.loaded = new Promise((resolve) => (script.onload = resolve));
      this.postMessage = (data) => this.loaded.then(() => inside.dispatchEvent(new MessageEvent("message", { data })));
      script.src = url;
      inside.document.body.append(script);
    }
  };
