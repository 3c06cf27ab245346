{{- define "kvmesh.labels" -}}
app.kubernetes.io/name: kvmesh
app.kubernetes.io/component: {{ . }}
{{- end }}

{{/* The environment of a service: what all have, then its own. Takes {root, role, own}. */}}
{{- define "kvmesh.env" -}}
- {name: KVMESH_{{ upper .role }}_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: KVMESH_NATS_URL, value: {{ .root.Values.nats.url | quote }}}
- {name: KVMESH_NATS_TLS_CA, value: /run/kvmesh/ca.pem}
- {name: KVMESH_NATS_TLS_CERT, value: /run/kvmesh/cert.pem}
- {name: KVMESH_NATS_TLS_KEY, value: /run/kvmesh/key.pem}
- {name: KVMESH_NATS_NKEY_SEED_FILE, value: /run/kvmesh/nkey.seed}
- {name: KVMESH_NATS_INBOX_PREFIX, value: _INBOX.{{ .role }}}
- {name: KVMESH_PROCESS_METRICS_HOST, value: 0.0.0.0}
- {name: KVMESH_{{ upper .role }}_METRICS_PORT, value: "9090"}
{{- range $name, $value := merge (dict) .own .root.Values.settings }}
- {name: {{ $name }}, value: {{ $value | quote }}}
{{- end }}
{{- end }}

{{/* The container of a service. Takes {root, role, own, resources, image, startup, env, mounts, ports}. */}}
{{- define "kvmesh.container" -}}
name: {{ .role }}
image: {{ .image | default .root.Values.image | quote }}
imagePullPolicy: {{ .root.Values.imagePullPolicy }}
args: [{{ .role }}]
env:
{{- include "kvmesh.env" . | nindent 2 }}
{{- with .env }}
{{- toYaml . | nindent 2 }}
{{- end }}
ports:
  - {name: metrics, containerPort: 9090}
{{- range $name, $port := .ports }}
  - {name: {{ $name }}, containerPort: {{ $port }}}
{{- end }}
readinessProbe:
  httpGet: {path: /health, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 4
livenessProbe:
  httpGet: {path: /live, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
startupProbe:
  httpGet: {path: /live, port: metrics}
  periodSeconds: 2
  timeoutSeconds: 4
  failureThreshold: {{ div (.startup | default 120) 2 }}
resources:
{{- toYaml .resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: credentials, mountPath: /run/kvmesh, readOnly: true}
  - {name: tmp, mountPath: /tmp}
{{- with .mounts }}
{{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{/* What the pods of all services have. Takes {root, role, grace, volumes, account}. */}}
{{- define "kvmesh.pod" -}}
{{- if .account }}
serviceAccountName: {{ .account }}
{{- end }}
automountServiceAccountToken: {{ not (not .account) }}
# variables of services would be taken for settings
enableServiceLinks: false
terminationGracePeriodSeconds: {{ .grace }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  seccompProfile: {type: RuntimeDefault}
volumes:
  - name: credentials
    secret: {secretName: {{ .root.Values.secretPrefix }}{{ .role }}, defaultMode: 288}
  - {name: tmp, emptyDir: {}}
{{- with .volumes }}
{{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "kvmesh.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {app.kubernetes.io/name: kvmesh, app.kubernetes.io/component: {{ . }}}}
  - maxSkew: 1
    topologyKey: topology.kubernetes.io/zone
    whenUnsatisfiable: ScheduleAnyway
    labelSelector: {matchLabels: {app.kubernetes.io/name: kvmesh, app.kubernetes.io/component: {{ . }}}}
{{- end }}
