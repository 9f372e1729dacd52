// Package hpaconformance proves package hpa against what it describes: tests drive the real controller of Kubernetes through random
// histories, in fake time, and compare every step. A module of its own, for k8s.io/kubernetes is big and nothing shipped needs it.
package hpaconformance
