// Package resourcelock stands in for the Kubernetes package of that name.
package resourcelock

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	coordinationv1 "k8s.io/client-go/kubernetes/typed/coordination/v1"
)

// LeaseLock is a lock by a lease.
type LeaseLock struct {
	LeaseMeta  metav1.ObjectMeta
	Client     coordinationv1.CoordinationV1Interface
	LockConfig ResourceLockConfig
}

// ResourceLockConfig says who asks for the lock.
type ResourceLockConfig struct{ Identity string }
