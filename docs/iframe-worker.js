// Browsers start no workers from files. In pages that are opened from a folder the worker of the
// search is therefore a script in a hidden frame.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.waiting = [];
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.onload = () => this.start(url);
      document.body.append(this.frame);
    }
    start(url) {
      const inside = this.frame.contentWindow;
      inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      const script = inside.document.createElement("script");
      script.src = url;
      script.onload = () => {
        this.send = (data) => inside.dispatchEvent(new MessageEvent("message", { data }));
        this.waiting.forEach(this.send);
      };
      inside.document.body.append(script);
    }
    postMessage(data) {
      this.send ? this.send(data) : this.waiting.push(data);
    }
    terminate() {
      this.frame.remove();
    }
  };
}
