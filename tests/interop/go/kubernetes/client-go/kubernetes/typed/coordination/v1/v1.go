// Package v1 stands in for the Kubernetes package of that name.
package v1

// CoordinationV1Interface gives access to leases.
type CoordinationV1Interface interface{}
