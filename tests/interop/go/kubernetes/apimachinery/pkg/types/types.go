// Package types stands in for the Kubernetes package of that name.
package types

// PatchType says how a patch is applied.
type PatchType string

// MergePatchType merges.
const MergePatchType PatchType = "merge"
