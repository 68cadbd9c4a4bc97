// Search from the disk: browsers start no worker from a file, so its script runs in a hidden frame instead.
// The theme's "offline" plugin fetches such a shim from the net unless one of this name is given.
"use strict";
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.title = "search";
      this.ready = new Promise((done) => {
        this.frame.addEventListener("load", () => this.start(url, done), { once: true });
      });
      document.body.append(this.frame);
    }
    start(url, done) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.addEventListener("load", done);
      inside.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.frame.remove();
    }
  };
}
