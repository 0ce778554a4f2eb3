"""What a metrics adapter offers an autoscaler: one external metric, by a query to Prometheus. HTTPS, as an APIService
needs it.

usage: python external_metrics.py HOST PORT CERTIFICATE KEY METRIC QUERY PROMETHEUS NAMESPACE

In the query ``<<.LabelMatchers>>`` stands for the namespace and the labels that the autoscaler selects, as in the rules
of Prometheus Adapter; NAMESPACE is the label that holds the namespace.
"""

from __future__ import annotations

import json
import ssl
import sys
import time
import urllib.parse
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

GROUP = "external.metrics.k8s.io/v1beta1"


def main() -> None:
    host, port, certificate, key, metric, query, prometheus, namespace = sys.argv[1:]

    def value(matchers: str) -> str:
        asked = urllib.parse.urlencode({"query": query.replace("<<.LabelMatchers>>", matchers)})
        with urllib.request.urlopen(f"{prometheus}/api/v1/query?{asked}", timeout=10) as answer:
            [found] = json.load(answer)["data"]["result"]
        return str(found["value"][1])

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urllib.parse.urlsplit(self.path)
            parts = url.path.removeprefix(f"/apis/{GROUP}").strip("/").split("/")
            if parts == [""]:
                resource = {"name": metric, "namespaced": True, "kind": "ExternalMetricValueList", "verbs": ["get"]}
                self._answer(
                    {"kind": "APIResourceList", "apiVersion": "v1", "groupVersion": GROUP, "resources": [resource]}
                )
            elif len(parts) == 3 and parts[0] == "namespaces" and parts[2] == metric:
                selector = urllib.parse.parse_qs(url.query).get("labelSelector", [""])[0]
                labels = {namespace: parts[1], **dict(pair.split("=") for pair in selector.split(",") if pair)}
                matchers = ",".join(f'{name}="{text}"' for name, text in labels.items())
                item = {
                    "metricName": metric,
                    "metricLabels": labels,
                    "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                    "value": value(matchers),
                }
                self._answer({"kind": "ExternalMetricValueList", "apiVersion": GROUP, "metadata": {}, "items": [item]})
            else:
                self.send_error(404)

        def _answer(self, document: dict[str, Any]) -> None:
            body = json.dumps(document).encode()
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    server = ThreadingHTTPServer((host, int(port)), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.serve_forever()


if __name__ == "__main__":
    main()
