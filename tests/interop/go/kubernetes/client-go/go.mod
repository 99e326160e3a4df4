module k8s.io/client-go

go 1.24.0

require k8s.io/apimachinery v0.33.3
