// Package v1 stands in for the Kubernetes package of that name.
package v1

// GetOptions are options of a read.
type GetOptions struct{}

// PatchOptions are options of a change.
type PatchOptions struct{}

// ObjectMeta names an object.
type ObjectMeta struct{ Name, Namespace string }
