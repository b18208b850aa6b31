{{/* The runtime's image, as fields of a container. */}}
{{- define "edl.image" -}}
image: {{ printf "%s:%s" .Values.image.repository .Values.image.tag }}
{{- with .Values.image.pullPolicy }}
imagePullPolicy: {{ . }}
{{- end }}
{{- end }}

{{/* What every pod has. */}}
{{- define "edl.pod" -}}
enableServiceLinks: false
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "edl.podSecurity" -}}
runAsNonRoot: true
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "edl.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* host:port of Redis, as pods of any namespace reach it. */}}
{{- define "edl.redisAddress" -}}
{{- if .Values.redis.create -}}
{{- if or .Values.redis.address .Values.redis.tls -}}
{{ fail "redis.address and redis.tls are for a Redis that is there: set redis.create=false, or leave them out" }}
{{- end -}}
edl-redis.{{ .Release.Namespace }}:6379
{{- else -}}
{{ required "redis.address is empty: it names the Redis to use where redis.create is false" .Values.redis.address }}
{{- end }}
{{- end }}

{{/* A variable whose value is in a Secret: (dict "name" NAME "secret" SECRET). */}}
{{- define "edl.secretVariable" -}}
- name: {{ .name }}
  valueFrom:
    secretKeyRef:
      name: {{ .secret.name }}
      key: {{ .secret.key }}
{{- end }}

{{/* The variables that name Redis and the registry's namespace. Those that others get from a pod need Redis's full name. */}}
{{- define "edl.registryVariables" -}}
{{ include "edl.secretVariable" (dict "name" "REDIS_PASSWORD" "secret" .Values.redis.secret) }}
- name: EDL_REDIS_URL
  {{- $sentinel := and .Values.redis.sentinelMaster (not .Values.redis.create) }}
  value: {{ .Values.redis.tls | ternary "rediss" "redis" }}{{ if $sentinel }}+sentinel{{ end }}://:$(REDIS_PASSWORD)@{{ include "edl.redisAddress" . }}/{{ if $sentinel }}{{ $sentinel }}/{{ end }}0
- name: EDL_NAMESPACE
  value: {{ .Values.registryNamespace }}
{{- end }}

{{/* What the controller may do in a namespace that it serves. */}}
{{- define "edl.controllerRules" -}}
- apiGroups: [paddlepaddle.org]
  resources: [trainingjobs]
  verbs: [get, list, patch, watch]
- apiGroups: [paddlepaddle.org]
  resources: [trainingjobs/status]
  verbs: [patch]
- apiGroups: [""]
  resources: [namespaces]
  verbs: [get]
- apiGroups: [coordination.k8s.io]
  resources: [leases]
  verbs: [create, get, patch]
- apiGroups: [batch]
  resources: [jobs]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [apps]
  resources: [deployments]
  verbs: [get, list, patch, watch]
- apiGroups: [""]
  resources: [pods]
  verbs: [delete, list, patch, watch]
- apiGroups: [""]
  resources: [pods/eviction]
  verbs: [create]
- apiGroups: [""]
  resources: [pods/log]
  verbs: [get]
- apiGroups: [""]
  resources: [secrets]
  verbs: [create, patch]
- apiGroups: [""]
  resources: [configmaps]
  verbs: [create, delete, get, list, patch, watch]
- apiGroups: [""]
  resources: [events]
  verbs: [create, list, watch]
- apiGroups: [""]
  resources: [resourcequotas]
  verbs: [list, watch]
- apiGroups: [kueue.x-k8s.io]
  resources: [workloads]
  verbs: [list, watch]
{{- end }}
