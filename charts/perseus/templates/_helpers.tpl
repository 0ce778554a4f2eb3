{{- /* Names, labels and fragments shared by the templates. Components: perseus-operator and perseus-agent. */ -}}

{{- define "perseus.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 48 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 48 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{- define "perseus.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- /* Without the chart's version: a new chart with the same programs must not restart agents, which reset clocks. */ -}}
{{- define "perseus.podLabels" -}}
{{ include "perseus.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/part-of: perseus
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "perseus.labels" -}}
{{ include "perseus.podLabels" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- /* Annotations of an object's metadata: those of every object, and "own" ones, which win. A line of their own after the labels; nothing if there are none. */ -}}
{{- define "perseus.annotations" -}}
{{- with merge (dict) (.own | default dict) (.root.Values.commonAnnotations | default dict) }}
  annotations: {{- toYaml . | nindent 4 }}
{{- end }}
{{- end -}}

{{- define "perseus.agentNamespace" -}}
{{- default .Release.Namespace .Values.agent.namespaceOverride -}}
{{- end -}}

{{- define "perseus.serviceAccount" -}}
{{- default (ternary (printf "%s-operator" (include "perseus.fullname" .)) "default" .Values.operator.serviceAccount.create) .Values.operator.serviceAccount.name -}}
{{- end -}}

{{- define "perseus.image" -}}
{{- $image := .image -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end -}}
{{ $image.repository }}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ default .root.Chart.AppVersion $image.tag }}{{ end -}}
{{- end -}}

{{- define "perseus.pullPolicy" -}}
{{- default .root.Values.image.pullPolicy .image.pullPolicy -}}
{{- end -}}

{{- /* Not empty: OpenShift, which assigns users to pods. */ -}}
{{- define "perseus.openshift" -}}
{{- $said := .Values.platform.openshift | toString -}}
{{- if or (eq $said "true") (and (eq $said "auto") (.Capabilities.APIVersions.Has "security.openshift.io/v1")) -}}
true
{{- end -}}
{{- end -}}

{{- /* SELinux options of pods that use directories of the node; empty: none. An ordinary container may write none of them. */ -}}
{{- define "perseus.nodeSELinux" -}}
{{- $options := .Values.agent.seLinuxOptions }}
{{- if and (not $options) (include "perseus.openshift" .) }}
{{- $options = dict "type" "spc_t" }}
{{- end }}
{{- with $options }}
{{- toYaml . }}
{{- end }}
{{- end -}}

{{- /* A settings map as environment: {leaseTtlS: 60} becomes PERSEUS_OPERATOR_LEASE_TTL_S=60. */ -}}
{{- define "perseus.settings" -}}
{{- range $name, $value := .settings }}
{{- if not (kindIs "invalid" $value) }}
- name: {{ printf "%s%s" $.prefix ($name | snakecase | upper) }}
  value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "perseus.secret" -}}
{{- if has .root.Values.tls.mode (list "secret" "podCertificate") -}}
{{- required (printf "tls.secret.%s: name the Secret, since tls.mode is %s" .who .root.Values.tls.mode) (index .root.Values.tls.secret .who) -}}
{{- else -}}
{{- printf "%s-%s-tls" (include "perseus.fullname" .root) .who -}}
{{- end -}}
{{- end -}}

{{- /* The volume with the certificate of operator or agent, by tls.mode; its files are named as those of a Secret. */}}
{{- define "perseus.certificate" -}}
{{- if eq .root.Values.tls.mode "podCertificate" -}}
{{- $pod := .root.Values.tls.podCertificate -}}
# A key for this pod alone, which the kubelet makes and renews.
projected:
  defaultMode: {{ .mode }}
  sources:
    - podCertificate:
        signerName: {{ required "tls.podCertificate.signerName: name the signer, since tls.mode is podCertificate" $pod.signerName }}
        keyType: {{ $pod.keyType }}
        maxExpirationSeconds: {{ $pod.maxExpirationSeconds }}
        keyPath: tls.key
        certificateChainPath: tls.crt
        {{- with $pod.userAnnotations }}
        userAnnotations: {{- toYaml . | nindent 10 }}
        {{- end }}
    {{- include "perseus.podCertificateAuthority" .root | nindent 4 }}
{{- else -}}
secret:
  secretName: {{ include "perseus.secret" . }}
  defaultMode: {{ .mode }}
{{- end -}}
{{- end -}}

{{- /* What signs pod certificates, as a source of a projected volume. */}}
{{- define "perseus.podCertificateAuthority" -}}
{{- $pod := .Values.tls.podCertificate -}}
{{- if $pod.authorityConfigMap -}}
- configMap:
    name: {{ $pod.authorityConfigMap }}
    items: [{key: ca.crt, path: ca.crt}]
{{- else -}}
- clusterTrustBundle:
    signerName: {{ $pod.signerName }}
    # Without a selector none would match.
    labelSelector: {}
    path: ca.crt
{{- end -}}
{{- end -}}

{{- define "perseus.pullSecrets" -}}
{{- with .Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- define "perseus.scrape" -}}
path: /metrics
interval: {{ .interval }}
honorLabels: {{ .honorLabels }}
{{- with .relabelings }}
relabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .metricRelabelings }}
metricRelabelings: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{- /* The node's directory of simulated GPUs. Like a driver's state, it must not outlive a restart of the node. */ -}}
{{- define "perseus.simulatedGpus" -}}
/run/perseus-simulated-gpus
{{- end -}}

{{- /* The account of the pods that simulate GPUs; empty: they need none. On OpenShift the agent's is the one that may use the node. */ -}}
{{- define "perseus.simulatorAccount" -}}
{{- if include "perseus.openshift" . -}}
{{ include "perseus.fullname" . }}-agent
{{- else if eq .Values.simulatedGpus.offeredAs "DynamicResources" -}}
{{ include "perseus.fullname" . }}-gpu-sim
{{- end -}}
{{- end -}}

{{- /* The issuer that cert-manager signs with: the one that is named, or the release's own. */}}
{{- define "perseus.issuer" -}}
{{- if .Values.tls.certManager.issuerRef -}}
{{- toYaml .Values.tls.certManager.issuerRef -}}
{{- else -}}
{name: {{ include "perseus.fullname" . }}-ca, kind: Issuer, group: cert-manager.io}
{{- end -}}
{{- end -}}

{{- /* How the webhook gives pods the socket: hostPath, resource, or auto (both, by namespace). */}}
{{- define "perseus.webhookSocket" -}}
{{- $possible := and .Values.agent.socketResource (not .Values.operator.namespaces) }}
{{- if and (eq .Values.webhook.socket "resource") (not $possible) }}
{{- fail "webhook.socket: resource needs agent.socketResource, and no operator.namespaces, because the operator must read nodes" }}
{{- end }}
{{- ternary .Values.webhook.socket "hostPath" $possible }}
{{- end }}

{{- /* The certificate of a Service of the operator, by tls.mode: a Secret, a Certificate, or neither, if the user makes it.
Sets "authority" in the given dict to the authority (base64) of a generated one. */}}
{{- define "perseus.servingCertificate" -}}
{{- $root := .root }}
{{- $secret := include "perseus.secret" (dict "root" $root "who" .who) }}
{{- $labels := include "perseus.labels" (dict "root" $root "component" "perseus-operator") }}
{{- $name := printf "%s-%s" (include "perseus.fullname" $root) .who }}
{{- $hosts := list (printf "%s.%s.svc" $name $root.Release.Namespace) (printf "%s.%s.svc.cluster.local" $name $root.Release.Namespace) }}
{{- if eq $root.Values.tls.mode "generated" }}
{{- $stored := default dict (lookup "v1" "Secret" $root.Release.Namespace $secret) }}
{{- $data := dig "data" dict $stored }}
{{- $now := int64 (now | unixEpoch) }}
{{- $issued := int64 (dig "metadata" "annotations" "perseus.energy/issued" "0" $stored) }}
{{- $young := lt (sub $now $issued) (div (mul (int64 $root.Values.tls.generated.validityDays) 86400) 3) }}
{{- if not (and $young (index $data "ca.crt") (index $data "tls.crt") (index $data "tls.key")) }}
{{- /* An upgrade keeps a young certificate. Its authority's key is not stored, so an older one gets another authority. */}}
{{- $issued = $now }}
{{- $days := int $root.Values.tls.generated.validityDays }}
{{- $ca := genCAWithKey (printf "perseus-%s-ca" .who) $days (genPrivateKey "ecdsa") }}
{{- $pair := genSignedCertWithKey (printf "perseus-%s" .who) nil $hosts $days $ca (genPrivateKey "ecdsa") }}
{{- $data = dict "ca.crt" (b64enc $ca.Cert) "tls.crt" (b64enc $pair.Cert) "tls.key" (b64enc $pair.Key) }}
{{- end }}
{{- $_ := set .made "authority" (index $data "ca.crt") }}
apiVersion: v1
kind: Secret
metadata:
  name: {{ $secret }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
  {{- include "perseus.annotations" (dict "root" $root "own" (dict "perseus.energy/issued" ($issued | toString))) }}
type: kubernetes.io/tls
data:
  {{- range $key := list "ca.crt" "tls.crt" "tls.key" }}
  {{ $key }}: {{ index $data $key }}
  {{- end }}
---
{{- else if eq $root.Values.tls.mode "certManager" }}
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {{ $secret }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- $labels | nindent 4 }}
  {{- include "perseus.annotations" (dict "root" $root) }}
spec:
  secretName: {{ $secret }}
  commonName: perseus-{{ .who }}
  dnsNames: {{- toYaml $hosts | nindent 4 }}
  usages: [server auth]
  duration: {{ $root.Values.tls.certManager.duration }}
  privateKey: {algorithm: ECDSA, size: 256, rotationPolicy: Always}
  issuerRef: {{- include "perseus.issuer" $root | nindent 4 }}
---
{{- end }}
{{- end -}}

{{- /*
The Secret with the certificate of a caller of the operator, of a separate authority, because the key of the authority that signs the
operator's is not stored. An upgrade keeps it while its name is the same. ca.crt verifies the operator.
*/}}
{{- define "perseus.callerCertificate" -}}
{{- $root := .root }}
{{- $secret := printf "%s-%s-tls" (include "perseus.fullname" $root) .who }}
{{- $kept := default dict (lookup "v1" "Secret" $root.Release.Namespace $secret) }}
{{- $caller := dig "data" dict $kept }}
{{- $now := int64 (now | unixEpoch) }}
{{- $issued := int64 (dig "metadata" "annotations" "perseus.energy/issued" "0" $kept) }}
{{- $young := lt (sub $now $issued) (div (mul (int64 $root.Values.tls.generated.validityDays) 86400) 3) }}
{{- if or (not $young) (ne .name (dig "metadata" "annotations" "perseus.energy/certificate-name" "" $kept)) }}
{{- $issued = $now }}
{{- $days := int $root.Values.tls.generated.validityDays }}
{{- $ca := genCAWithKey (printf "perseus-%s-ca" .who) $days (genPrivateKey "ecdsa") }}
{{- $pair := genSignedCertWithKey .name nil (list .name) $days $ca (genPrivateKey "ecdsa") }}
{{- $caller = dict "caller-ca.crt" (b64enc $ca.Cert) "tls.crt" (b64enc $pair.Cert) "tls.key" (b64enc $pair.Key) }}
{{- end }}
{{- $_ := set .made "caller" $caller }}
---
apiVersion: v1
kind: Secret
metadata:
  name: {{ $secret }}
  namespace: {{ $root.Release.Namespace }}
  labels: {{- include "perseus.labels" (dict "root" $root "component" (printf "perseus-%s" .who)) | nindent 4 }}
  {{- include "perseus.annotations" (dict "root" $root "own" (dict "perseus.energy/certificate-name" .name "perseus.energy/issued" ($issued | toString))) }}
type: kubernetes.io/tls
data:
  ca.crt: {{ .ca }}
  {{- range $key := list "caller-ca.crt" "tls.crt" "tls.key" }}
  {{ $key }}: {{ index $caller $key }}
  {{- end }}
{{- end }}
